// For Android Studio and the Gradle of an ordinary developer's machine; `make apk` builds the same with Maven.
pluginManagement {
    val agp: String by settings
    val kotlin: String by settings
    repositories {
        google()
        mavenCentral()
        gradlePluginPortal()
    }
    plugins {
        id("com.android.application") version agp
        id("org.jetbrains.kotlin.android") version kotlin
        id("org.jetbrains.kotlin.jvm") version kotlin
    }
}

dependencyResolutionManagement {
    repositoriesMode.set(RepositoriesMode.FAIL_ON_PROJECT_REPOS)
    repositories {
        google()
        mavenCentral()
    }
}

rootProject.name = "ondevice"
include(":core", ":app")
// core/ holds Maven's build alone; its Gradle file lies here beside the others.
project(":core").buildFileName = "../core.gradle.kts"
